"""The web application of `psigrad studio`: it reads run folders and owns the database of labels."""
