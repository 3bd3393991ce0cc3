{{ config(materialized='view') }}

-- What a load touches: the keys of its own lines, and, when a file landed again, the keys of the file's earlier
-- lines too, which the new load may have corrected away. A reader filters on last_ingested_at; the first branch then
-- reads only new files of the table (their statistics hold ingested_at), and the second nothing at all unless a file
-- did land again (adaptive execution drops a join with an empty side).
with landed_again as (
    select
        later.file_path,
        later.load_id,
        later.ingested_at
    from {{ landed('bronze', 'bronze_visits_files') }} as later
    left semi join {{ landed('bronze', 'bronze_visits_files') }} as earlier
        on later.file_path = earlier.file_path
        and later.load_id > earlier.load_id
)

select
    visit_id,
    event_time,
    event_date,
    date as landing_date,
    ingested_at as last_ingested_at
from {{ landed('parsed', 'silver_visits_parsed') }}

union all

select
    parsed.visit_id,
    parsed.event_time,
    parsed.event_date,
    parsed.date as landing_date,
    landed_again.ingested_at as last_ingested_at
from {{ landed('parsed', 'silver_visits_parsed') }} as parsed
inner join landed_again
    on parsed.file_path = landed_again.file_path
    and parsed.load_id < landed_again.load_id
