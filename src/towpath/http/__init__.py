"""The network door: `towpath serve`. Queues and locks over HTTP/1.1, wire compatible with lockd.

`server` listens, `routes` maps paths to handlers, `exchange` is one request with its response, `problems` the
error envelope, `wire` the JSON types, `multipart` the framing of messages, `mount` the server as a part of
another application. `authentication` finds the client of a request (`tokens`, `certificates`), `access` has
its rights, `rates` its limits, `tls` the files of the server. No other room imports litestar, uvicorn or
cryptography."""
