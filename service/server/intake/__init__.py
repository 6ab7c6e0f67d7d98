"""The way of a message into the server and of its answer out of it, with bounds on bytes and on time."""
