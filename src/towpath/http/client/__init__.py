"""The client of the HTTP server: `QueueClient`, and `AsyncQueueClient` for coroutines. It needs the extra
`client`. Its calls are those of lockd's protocol, and two for many messages.

`client` and `aclient` are two surfaces of the same coroutines: `calls` (requests and failover), `received`
(messages), `documents` (locks and state) and `consumer`. `requests` builds the bytes to send, `frames` parses
the bytes that arrive, `transport` is the only module with httpx2."""

from towpath.http.client.aclient import AsyncQueueClient as AsyncQueueClient
from towpath.http.client.client import QueueClient as QueueClient
from towpath.http.client.documents import DocumentLease as DocumentLease
from towpath.http.client.messages import AsyncHeldLock as AsyncHeldLock
from towpath.http.client.messages import AsyncReceivedMessage as AsyncReceivedMessage
from towpath.http.client.messages import HeldLock as HeldLock
from towpath.http.client.messages import ReceivedMessage as ReceivedMessage
from towpath.http.client.requests import DeliveryReceipt as DeliveryReceipt
