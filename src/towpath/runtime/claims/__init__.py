"""Which waiter gets a job: the dispatcher, leases and their heartbeats, and the receiver of messages."""
