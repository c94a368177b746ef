"""Replications of the literature's claims, and a simulation: `psigrad experiment NAME` runs them from a source checkout."""
