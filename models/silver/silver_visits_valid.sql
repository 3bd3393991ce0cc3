{{ config(materialized='view') }}

select *
from {{ ref('silver_visits_flagged') }}
where status_flag is null
