"""The policies and critics of control: networks, distributions and their gradients."""
