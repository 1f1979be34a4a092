"""The paper: which token is written at which step, who may see whom, and the loop that does it."""
