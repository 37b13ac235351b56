"""The nets that learned optimizers train, and their data: `models`, `datasets`, `files`."""
