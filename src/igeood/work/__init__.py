"""Many files: each one is a unit of work, done in this process, in several, or on a Ray cluster."""
