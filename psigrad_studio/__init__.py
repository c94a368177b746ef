"""The web application of `psigrad studio`. It shows run folders, and stores human labels in a database."""
