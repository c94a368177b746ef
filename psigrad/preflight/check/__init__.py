"""`psigrad check`: whether a model, its data and its settings will train rightly, before they do."""
