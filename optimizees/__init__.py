"""The nets that optimizers train, and their data: `models`, `datasets`, `files`."""
