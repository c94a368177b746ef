"""The parts of which methods are composed, one file for each slot."""
