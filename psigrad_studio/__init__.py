"""`psigrad studio`: the web application. Reads run folders, owns the label database."""
