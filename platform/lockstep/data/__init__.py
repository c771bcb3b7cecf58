"""Data: the order of the samples and the way from the dataset to the device."""
