"""One module for each replicated claim, named after its experiment. docs/claims.md contains the results."""
