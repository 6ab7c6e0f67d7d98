"""The wire of routers: event streams of live servers, read into a view of the fleet."""
