"""Pictures, one file each; they need the ``figures`` extra."""
