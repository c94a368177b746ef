"""What a method needs beside tokens and rewards, each in a file: a reference, a teacher, old log-probs, a critic's values."""
