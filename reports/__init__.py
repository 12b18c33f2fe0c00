"""What happened: records, and how they are shown."""
