-- Fails with each device in which the full list and the increments' current state differ: a lost or late increment.
-- Without one of the two feeds there is nothing to compare.
with listed as (
    select
        type,
        version,
        full_name
    from {{ landed('bronze', 'bronze_devices_list') }}
),

merged as (
    select
        type,
        version,
        full_name
    from {{ ref('silver_devices') }}
)

select
    coalesce(listed.type, merged.type) as type,
    coalesce(listed.version, merged.version) as version,
    listed.full_name as listed_name,
    merged.full_name as merged_name
from listed
full outer join merged
    on listed.type = merged.type
    and listed.version = merged.version
where
    not listed.full_name <=> merged.full_name
    and exists (select anything.type from listed as anything)
    and exists (select something.type from merged as something)
