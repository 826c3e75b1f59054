-- Owners that claim jobs. The process of each holds the session advisory lock `lock` on its listening
-- connection. A row whose lock is free belongs to a process that ended without closing the ledger, or that
-- has just lost its connection.
CREATE TABLE towpath.owner (
    name text COLLATE "C" PRIMARY KEY,
    lock bigint NOT NULL
);
