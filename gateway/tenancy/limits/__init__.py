"""How much a tenant may do: requests and tokens in a minute, and requests at once."""
