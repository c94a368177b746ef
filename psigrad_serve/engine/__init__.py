"""The sampling engine: one model for many clients, whose concurrent requests are decoded in one batch."""
