"""Starting ranks: on this machine, and on clusters."""
