"""The parts that methods are made of, a file for each slot."""
