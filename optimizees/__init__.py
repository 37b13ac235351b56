"""The data that learned optimizers are meta-trained and tested on: `datasets`."""
