"""What a console asks: the state of this gateway and its changes, and what admins do there."""
