"""The spec: everything a user configures, read once, checked, and immutable from then on."""
