{#- SCD Type 2: the rows that the changes of a key make. -#}

{% macro _scd2_rows(history, batch) %}
    {#- All rows of a feed, from the batch alone. -#}
with arrived as (
    {{ lakehouse_patterns._scd2_arrived(history, batch) | indent(4) }}
    {#- As the windows want it; and no check fails inside the task that writes, under a stack trace. #}
    distribute by {{ lakehouse_patterns._scd2_entity(history) }}
),

{{ lakehouse_patterns._scd2_chain(history, 'arrived') }}

select
    {{ lakehouse_patterns._scd2_columns(history) | indent(4) }}
from bounded
{%- endmacro %}


{% macro _scd2_rebuilt_rows(history, batch, target) %}
    {#-
        The rows of the batch's keys, rebuilt from the batch and from what the table holds of them: only those that
        differ from the table's. lakehouse_patterns_starts_at, the time of a row's first change, identifies the row
        within its key; without lakehouse_patterns_starts_row no change starts this row of the table any more.
    -#}
with arrived as (
    {{ lakehouse_patterns._scd2_arrived(history, batch) | indent(4) }}
),

stored_changes as (
    {{ lakehouse_patterns._scd2_stored_changes(history, target) | indent(4) }}
),

all_changes as (
    select * from arrived
    union all
    select * from stored_changes
),

{{ lakehouse_patterns._scd2_chain(history, 'all_changes') }}

select
    {{ lakehouse_patterns._scd2_columns(history) | indent(4) }},
    changed_at as lakehouse_patterns_starts_at,
    starts_row as lakehouse_patterns_starts_row
from bounded
where not starts_row or not stored_row <=> struct(tracked, effective_to, changes)
{%- endmacro %}


{% macro _scd2_entity(history) %}
    {%- set keys = [] -%}
    {%- for name in history.key -%}
        {%- do keys.append('key_' ~ loop.index) -%}
    {%- endfor -%}
    {{ return(keys | join(', ')) }}
{% endmacro %}


{% macro _scd2_chain(history, changes) %}
    {#- CTEs from a relation of changes to `bounded`: one row for each row of the history, or that the table has. -#}
    {%- set entity = lakehouse_patterns._scd2_entity(history) -%}
    {%- set sequence = ['sequence'] if history.sequence else [] -%}
    {%- set untracked = ['untracked'] if history.untracked else [] -%}
    {%- set change = (['changed_at'] + sequence + ['is_deleted'] + untracked) | join(', ') -%}
-- Of the changes of one key at one time only the last one ever takes effect; attributes break the last ties.
effective_changes as (
    select
        {{ entity }},
        changed_at,
        max(struct({{ (sequence + ['is_deleted', 'tracked'] + untracked) | join(', ') }})) as last_change,
        max(stored_row) as stored_row
    from {{ changes }}
    group by {{ entity }}, changed_at
),

compared as (
    select
        {{ entity }},
        changed_at,
        last_change.*,
        stored_row,
        not last_change.is_deleted and not last_change.tracked <=> lag(last_change.tracked) over chain as opens_version,
        row_number() over chain = 1 as is_first
    from effective_changes
    window chain as (partition by {{ entity }} order by changed_at)
),

numbered as (
    select
        *,
        count_if(opens_version) over (partition by {{ entity }} order by changed_at) as version
    from compared
),

folded as (
    select
        *,
        min(if(is_deleted, changed_at, null)) over same_version as deleted_at,
        {%- if history.untracked %}
        max_by(untracked, changed_at) filter (where not is_deleted) over same_version as latest_untracked,
        {%- endif %}
        array_sort(collect_list(struct({{ change }})) over same_version) as changes
    from numbered
    window same_version as (partition by {{ entity }}, version)
),

bounded as (
    select
        *,
        opens_version or is_first as starts_row,
        coalesce(
            deleted_at,
            lead(if(opens_version, changed_at, null)) ignore nulls over (partition by {{ entity }} order by changed_at)
        ) as effective_to
    from folded
    where opens_version or is_first or stored_row is not null
)
{%- endmacro %}


{% macro _scd2_columns(history) %}
    {#- The table's columns, as a select list over `bounded`. -#}
{%- for name in lakehouse_patterns.quoted_names(history.key) -%}
key_{{ loop.index }} as {{ name }},
{% endfor -%}
{%- for name in lakehouse_patterns.quoted_names(history.tracked, 'tracked') -%}
{{ name }},
{% endfor -%}
{%- for name in lakehouse_patterns.quoted_names(history.untracked, 'latest_untracked') -%}
{{ name }},
{% endfor -%}
if(opens_version, changed_at, null) as effective_from,
effective_to,
effective_to is null as is_current,
deleted_at is not null as closed_by_delete,
changes
{%- endmacro %}
