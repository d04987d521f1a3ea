"""Where and when: how the flows are deployed."""
