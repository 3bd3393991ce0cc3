{#- The rules that every history keeps, as a generic test: for `materialized='scd2'`, snapshots and tables of others. -#}

{% test scd_type_2_invariants(
    model,
    unique_key,
    effective_from='effective_from',
    effective_to='effective_to',
    is_current=none,
    gap_allowed_when='closed_by_delete'
) %}
    {#-
        Fails with one row for each broken rule of a version: key, validity and the rule's name. Only the struct `entity`
        has a user's names, which may be those of our columns.
    -#}
    {%- set names = lakehouse_patterns.as_list(unique_key) -%}
    {%- set keys, nulls = lakehouse_patterns.quoted_names(names), [] -%}
    {%- do lakehouse_patterns.require(keys | length > 0, 'scd_type_2_invariants needs unique_key') -%}
    {%- for name in names -%}
        {%- do nulls.append(lakehouse_patterns.quoted_name(name, 'entity') ~ ' is null') -%}
    {%- endfor -%}
    {%- set entity = keys | join(', ') -%}
    {%- set begins = lakehouse_patterns.quoted_name(effective_from) -%}
    {%- set ends = lakehouse_patterns.quoted_name(effective_to) -%}
    {%- set current = lakehouse_patterns.quoted_name(is_current) if is_current else ends ~ ' is null' -%}
with chained as (
    select
        struct({{ entity }}) as entity,
        {{ begins }} as effective_from,
        {{ ends }} as effective_to,
        {{ current }} as is_current,
        coalesce({{ gap_allowed_when }}, false) as gap_allowed,
        lead({{ begins }}) over by_start as next_from,
        row_number() over by_start = count(*) over by_key as is_last,
        row_number() over by_start = 1 as is_first,
        count_if({{ current }}) over by_key as current_versions
    from {{ model }}
    window
        by_key as (partition by {{ entity }}),
        by_start as (
            partition by {{ entity }} order by {{ begins }} asc nulls first, {{ ends }} asc nulls last
        )
),

judged as (
    select
        *,
        array_compact(array(
            case when {{ nulls | join(' or ') }} then 'null key' end,
            case when effective_from is null and not (is_first and gap_allowed) then 'unknown start' end,
            case when effective_from >= effective_to then 'start not before end' end,
            case when is_current is distinct from (effective_to is null) then 'current and open differ' end,
            case when effective_from <=> next_from and not is_last then 'start not unique' end,
            case when effective_to is null and not is_last then 'open before the last version' end,
            case when effective_to > next_from then 'overlap' end,
            case when effective_to < next_from and not gap_allowed then 'gap' end,
            case when is_last and current_versions > 1 then 'several current versions' end,
            case when is_last and current_versions = 0 and not gap_allowed then 'no current version' end
        )) as broken_rules
    from chained
)

select
    entity.*,
    effective_from,
    effective_to,
    explode(broken_rules) as broken_rule
from judged
{% endtest %}
