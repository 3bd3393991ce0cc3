{{ config(materialized='view') }}

select * from values
    (1, 'ada@example.org', 1, timestamp '2026-01-01 08:00:00', false),
    (1, 'ada@example.com', 2, timestamp '2026-01-02 08:00:00', false),
    (2, 'bob@example.org', 1, timestamp '2026-01-01 09:00:00', false),
    (2, 'bob@example.org', 2, timestamp '2026-01-03 09:00:00', true)
as changes (customer_id, email, revision, changed_at, is_deleted)
