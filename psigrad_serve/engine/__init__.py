"""One model for many who ask: requests that come and go are decoded together."""
