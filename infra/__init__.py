"""The Pulumi program: a pool of large machines, Kueue in front of it, and what Jobs need."""
