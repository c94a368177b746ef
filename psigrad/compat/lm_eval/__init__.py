"""Tasks of EleutherAI's lm-eval on psigrad's models."""
