-- Rows of a ledger as version 1 of the schema kept them. Frozen: every later version must be able to open this file.

UPDATE towpath_meta SET schema = 1, min_schema = 1, next_seq = 26, next_version = 3, last = 1700000001000000;
INSERT INTO towpath_job VALUES
    ('done', 1, 'q', 'p', '', 5, 'done', '', 1700000000000000, NULL, 1, 0, 0, 20, 5, 1, NULL, NULL, 60000000, 1, 'done', NULL, NULL, NULL, 1700003600000000, 0, NULL, NULL, 0, NULL, NULL, NULL, NULL, 'c1', 1700000000000000, 1700000000000000, 1700000000000000, 2, 'application/json'),
    ('failed', 2, 'q', NULL, 'mail', 5, 'failed', 'fatal', 1700000000000000, NULL, 1, 1, 0, 20, 5, 1, NULL, NULL, 60000000, 1, 'failed', NULL, NULL, NULL, NULL, 0, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, 1700000000000000, 1700000000000000, 1700000000000000, 0, 'application/json'),
    ('canceled', 3, 'q', NULL, '', 5, 'canceled', 'requested', 1700000000000000, NULL, 0, 0, 0, 20, 5, 0, NULL, NULL, NULL, 0, NULL, NULL, NULL, NULL, 1700003600000000, 0, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, 1700000000000000, NULL, 1700000000000000, 0, 'application/json'),
    ('dead-letter', 4, 'q', NULL, '', 5, 'failed', 'dependency', 1700000000000000, NULL, 0, 0, 0, 20, 5, 0, NULL, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, 0, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, 1700000000000000, NULL, 1700000000000000, 0, 'application/json'),
    ('held', 5, 'q', NULL, '', 3, 'running', '', 1700000000000000, NULL, 1, 0, 0, 20, 5, 1, 'worker', 1700000060000000, 60000000, 0, NULL, NULL, 1000000, 5, NULL, 0, NULL, NULL, 0, NULL, NULL, 3, 9, NULL, 1700000000000000, 1700000000000000, NULL, 4, 'application/json'),
    ('stopping', 6, 'q', 'p', '', 5, 'running', '', 1700000000000000, NULL, 1, 0, 0, 20, 5, 1, 'worker', 1700000060000000, 60000000, 0, NULL, 'requested', NULL, NULL, NULL, 0, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, 1700000000000000, 1700000000000000, NULL, 0, 'application/json'),
    ('again', 7, 'q', NULL, '', 5, 'scheduled', 'retry', 1700000061000000, NULL, 1, 1, 0, 20, 5, 1, NULL, NULL, 60000000, 1, 'scheduled', NULL, NULL, NULL, NULL, 0, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, 1700000001000000, 1700000001000000, NULL, 0, 'application/json'),
    ('handed-back', 8, 'q', NULL, '', 5, 'ready', 'released', 1700000001000000, NULL, 0, 0, 0, 20, 5, 1, NULL, NULL, 60000000, 1, 'ready', NULL, NULL, NULL, NULL, 0, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, 1700000001000000, 1700000001000000, NULL, 0, 'application/json'),
    ('ready', 9, 'q', NULL, '', 5, 'ready', '', 1700000001000000, 1700001001000000, 0, 0, 0, 20, 5, 0, NULL, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, 0, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, 1700000001000000, NULL, NULL, 1, 'application/json'),
    ('late', 10, 'q', NULL, '', 5, 'scheduled', 'delay', 1700000051000000, NULL, 0, 0, 0, 20, 5, 0, NULL, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, 0, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, 1700000001000000, NULL, NULL, 0, 'application/json'),
    ('blocked', 11, 'q', NULL, '', 5, 'blocked', '', 1700000001000000, NULL, 0, 0, 0, 20, 5, 0, NULL, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, 1, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, 1700000001000000, NULL, NULL, 0, 'application/json'),
    ('also', 12, 'q', NULL, '', 5, 'blocked', '', 1700000001000000, NULL, 0, 0, 0, 20, 5, 0, NULL, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, 2, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, 1700000001000000, NULL, NULL, 0, 'application/json'),
    ('unsealed', 13, 'q', NULL, '', 5, 'blocked', '', 1700000001000000, NULL, 0, 0, 0, 20, 5, 0, NULL, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, 1, 'open', NULL, 0, NULL, NULL, NULL, NULL, NULL, 1700000001000000, NULL, NULL, 0, 'application/json'),
    ('member1', 14, 'members', NULL, '', 5, 'ready', '', 1700000001000000, NULL, 0, 0, 0, 20, 5, 0, NULL, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, 0, 'sealed', NULL, 0, NULL, NULL, NULL, NULL, NULL, 1700000001000000, NULL, NULL, 0, 'application/json'),
    ('member2', 15, 'members', NULL, '', 5, 'ready', '', 1700000001000000, NULL, 0, 0, 0, 20, 5, 0, NULL, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, 0, 'sealed', NULL, 0, NULL, NULL, NULL, NULL, NULL, 1700000001000000, NULL, NULL, 0, 'application/json'),
    ('runs', 16, 'members2', NULL, '', 5, 'running', '', 1700000001000000, NULL, 1, 0, 0, 20, 5, 1, 'worker', 1700000061000000, 60000000, 0, NULL, 'aborted', NULL, NULL, NULL, 0, 'aborting', NULL, 0, NULL, NULL, NULL, NULL, NULL, 1700000001000000, 1700000001000000, NULL, 0, 'application/json'),
    ('gated', 17, 'q', NULL, '', 5, 'blocked', '', 1700000001000000, NULL, 0, 0, 0, 20, 5, 0, NULL, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, 1, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, 1700000001000000, NULL, NULL, 0, 'application/json'),
    ('gated-anyway', 18, 'q', NULL, '', 5, 'blocked', '', 1700000001000000, NULL, 0, 0, 0, 20, 5, 0, NULL, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, 1, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, 1700000001000000, NULL, NULL, 0, 'application/json'),
    ('unique', 19, 'q', NULL, '', 5, 'ready', '', 1700000001000000, NULL, 0, 0, 0, 20, 5, 0, NULL, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, 0, NULL, NULL, 0, 'u', 'unique', NULL, NULL, NULL, 1700000001000000, NULL, NULL, 0, 'application/json'),
    ('older', 20, 'q', NULL, '', 5, 'canceled', 'superseded', 1700000001000000, NULL, 0, 0, 0, 20, 5, 0, NULL, NULL, NULL, 0, NULL, NULL, NULL, NULL, 1700003601000000, 0, NULL, NULL, 0, 'r', 'replace', NULL, NULL, NULL, 1700000001000000, NULL, 1700000001000000, 0, 'application/json'),
    ('newer', 21, 'q', NULL, '', 5, 'ready', '', 1700000001000000, NULL, 0, 0, 0, 20, 5, 0, NULL, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, 0, NULL, NULL, 0, 'r', 'replace', NULL, NULL, NULL, 1700000001000000, NULL, NULL, 0, 'application/json'),
    ('serial', 22, 'q', 'serial:s', '', 5, 'ready', '', 1700000001000000, NULL, 0, 0, 0, 20, 5, 0, NULL, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, 0, NULL, 'done', 2, 's', 'serial', NULL, NULL, NULL, 1700000001000000, NULL, NULL, 0, 'application/json'),
    ('wait', 24, 'paused', NULL, '', 5, 'ready', '', 1700000001000000, NULL, 0, 0, 0, 20, 5, 0, NULL, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, 0, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, 1700000001000000, NULL, NULL, 0, 'application/json'),
    ('lost', 25, 'lossy', NULL, '', 5, 'running', '', 1700000001000000, NULL, 1, 0, 0, 20, 5, 1, 'worker', 1700000061000000, 60000000, 0, NULL, NULL, NULL, NULL, NULL, 0, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, 1700000001000000, 1700000001000000, NULL, 0, 'application/json');
INSERT INTO towpath_body VALUES
    (8192, X'7B7D'),
    (9216, X'7B2268223A2276227D'),
    (10240, X'726573756C74'),
    (19456, X'62726F6B656E'),
    (40960, X'776F726B'),
    (45056, X'637572736F72'),
    (60416, X'6C61746572'),
    (73728, X'78');
INSERT INTO towpath_edge VALUES
    (2, 4, 0),
    (5, 11, 0),
    (5, 12, 1),
    (11, 12, 0);
INSERT INTO towpath_gate VALUES
    ('sealed', 17, 0),
    ('sealed', 18, 1);
INSERT INTO towpath_group VALUES
    ('aborting', 'aborting', NULL, 'continue', 1, 1, 0, 0, 0, 0, 1700000001000000, NULL),
    ('closed', 'closed', 'done', 'continue', 0, 0, 0, 0, 0, 0, 1700000001000000, 1700000001000000),
    ('open', 'open', NULL, 'continue', 1, 1, 0, 0, 0, 0, 1700000001000000, NULL),
    ('sealed', 'sealed', NULL, 'abort', 2, 2, 0, 0, 0, 0, 1700000001000000, NULL);
INSERT INTO towpath_then VALUES
    ('sealed', '{"done":[{"id":"then","queue":"callbacks","payload":"dA=="}],"failed":[{"id":"undo","queue":"callbacks"}]}');
INSERT INTO towpath_key VALUES
    ('', 'r', 'newer', 21, 0, NULL),
    ('', 'u', 'unique', 19, 1700003601000000, NULL);
INSERT INTO towpath_queue VALUES
    ('lossy', 0, 0, 0, 1, 0, 0, 0, 0, 0, NULL, NULL, NULL, NULL, NULL, NULL, 0, NULL, NULL, 0, 0),
    ('members', 0, 0, 2, 0, 0, 0, 0, 2, 0, NULL, NULL, NULL, NULL, NULL, NULL, 0, NULL, NULL, 0, 0),
    ('members2', 0, 0, 0, 1, 0, 0, 0, 0, 0, NULL, NULL, NULL, NULL, NULL, NULL, 0, NULL, NULL, 0, 0),
    ('paused', 0, 0, 1, 0, 0, 0, 0, 1, 1, 'lunch', NULL, 3, NULL, NULL, NULL, 0, NULL, NULL, 0, 0),
    ('q', 5, 2, 5, 2, 1, 2, 2, 4, 0, NULL, 100, NULL, 100, 1000000, 50, 1700000000520000, 3600000000, 1000, 0, 333333),
    ('trash', 0, 0, 0, 0, 0, 0, 0, 0, 0, NULL, NULL, NULL, NULL, NULL, NULL, 0, NULL, NULL, 0, 0);
INSERT INTO towpath_part VALUES
    ('q', 'p', 0, 1, 0, NULL, 2, 10, 1000000, 5, 1699999999800000, 3, 666666, 1),
    ('q', 'serial:s', 1, 0, 0, NULL, 1, NULL, NULL, NULL, 0, 1, 0, 0);
INSERT INTO towpath_note VALUES
    ('lock', X'6D65', 2, 2, 1700000601000000),
    ('note', X'0076616C7565', 1, 1, NULL);
INSERT INTO towpath_tombstone VALUES
    ('gone', 23, 'canceled', 0, NULL, 1700003601000000),
    ('refused', 19, 'done', 0, 'unique', 1700003601000000);
