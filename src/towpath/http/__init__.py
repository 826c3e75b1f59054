"""The network door: `towpath serve`. Queues and locks over HTTP/1.1, wire compatible with lockd.

`server` listens, `routes` maps paths to handlers, `exchange` is one request with its response, `problems` the
error envelope, `wire` the JSON types, `multipart` the framing of messages, `mount` the server as a part of
another application. No other room imports litestar or uvicorn."""
