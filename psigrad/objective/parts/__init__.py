"""The parts of which methods are composed, one file for each slot. Their examples use `psigrad.objective.small_batches`."""
