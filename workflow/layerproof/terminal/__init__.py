"""What a run says on the terminal: its progress, and as its last words the verdict."""
