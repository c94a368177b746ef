"""Replications of claims from the literature, and a simulation. `psigrad experiment NAME` runs them from a source checkout."""
