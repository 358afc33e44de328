"""The routes of the admin API, one module per idea; they check the request, ask the shards and shape the answer."""
