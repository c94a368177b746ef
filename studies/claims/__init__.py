"""A module for each claim that is run again, by the name of its experiment; docs/claims.md has what was found."""
