"""What is asked before a run: will it fit, does it compute the same, how fast is it, what does this machine offer."""
