{{ config(materialized='view') }}

select * from values
    (1, 'new', date '2026-01-01', timestamp '2026-01-01 10:00:00'),
    (2, 'paid', date '2026-01-02', timestamp '2026-01-02 10:00:00')
as orders (order_id, status, day, updated_at)
