"""One model for many clients: concurrent requests are decoded together."""
