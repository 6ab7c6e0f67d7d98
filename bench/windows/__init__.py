"""What layers with a sliding window hold while long prompts run, and what a hit needs of that."""
