"""The parts that methods are composed of, grouped by slot. Their examples use `psigrad.objective.small_batches`."""
