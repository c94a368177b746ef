"""Policies and critics of control: networks, distributions, their gradients."""
