from towpath import After, Query, Spec, micros, new_id, open_ledger
from towpath.commands import Append, Claim, Claimed, Done, Retry, Settle, Want

ledger = open_ledger("sqlite:///work.db")

# Write down two jobs. The second waits for the first.
photo = Spec(id=new_id(), queue="photos", kind="shrink", payload=b'{"file": "cat.jpg"}', priority="high")
album = Spec(id=new_id(), queue="photos", kind="publish", payload=b'{"album": "pets"}', after=(After(photo.id),))
ledger.apply([Append((photo, album))])
print(ledger.explain(album.id))

# Work: take what is ready on a lease of 30 seconds, do it, say how it ended.
while True:
    [answer] = ledger.apply([Claim(owner="me", wants=(Want("photos", 10),), lease=micros(30))])
    if not isinstance(answer, Claimed) or not answer.claims:
        break
    for claim in answer.claims:
        print("attempt", claim.job.attempts, "at", claim.job.kind, claim.job.payload.decode())
        outcome = Retry(error="the disk was asleep") if claim.job.attempts == 1 else Done(result=b'"fine"')
        ledger.apply([Settle(claim.id, claim.fence, outcome)])

print(ledger.explain(album.id))
print(ledger.queues()["photos"].counts)
print([job.kind for job in ledger.find(Query(queue="photos", limit=2)).jobs])
ledger.close()
