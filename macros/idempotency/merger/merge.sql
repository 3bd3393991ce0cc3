{#- Merger: the MERGE statement. Its docstring, with why dbt-spark's own does not do, is in overrides.sql. -#}

{% macro _merger_same_key(merger, left, right) %}
    {%- set conditions = [] -%}
    {%- for name in merger.key -%}
        {%- set equals = ' <=> ' if name in merger.nullable_key else ' = ' -%}
        {%- do conditions.append(left ~ '.' ~ lakehouse_patterns.quoted_name(name) ~ equals ~ right ~ '.' ~ lakehouse_patterns.quoted_name(name)) -%}
    {%- endfor -%}
    {{ return(conditions) }}
{% endmacro %}


{% macro _merger_newer(merger, batch, stored, known=none) %}
    {#-
        Whether the batch's row, or the change that its known value comes from, is newer than the stored row. Structs
        compare field by field and take NULL for the least: a stored row without a sequence is the oldest, and so is one
        whose sequence is NaN or infinite.
    -#}
    {%- set known_order = [] -%}
    {%- for name in merger.sequence -%}
        {%- set quoted = lakehouse_patterns.quoted_name(name, stored) -%}
        {%- do known_order.append(
            lakehouse_patterns._finite_or_null_sql(quoted) if merger.types[name] in ['float', 'double'] else quoted
        ) -%}
    {%- endfor -%}
    {%- set row = 'struct(' ~ (lakehouse_patterns.quoted_names(merger.sequence, batch) | join(', ')) ~ ')' -%}
    {{ return(
        (known or row) ~ ' > struct(' ~ (known_order | join(', ')) ~ ')'
    ) }}
{% endmacro %}


{% macro _merger_updated(merger, name, batch, stored) %}
    {#- What a matched row gets in one column. -#}
    {%- set new, old = batch ~ '.' ~ lakehouse_patterns.quoted_name(name), stored ~ '.' ~ lakehouse_patterns.quoted_name(name) -%}
    {%- if name not in merger.keep_on_null -%}
        {{ return(new) }}
    {%- elif not merger.sequence -%}
        {{ return('coalesce(' ~ new ~ ', ' ~ old ~ ')') }}
    {%- endif -%}
    {%- set known = batch ~ '.lakehouse_patterns_known_' ~ (merger.keep_on_null.index(name) + 1) -%}
    {{ return(
        'case when ' ~ lakehouse_patterns._merger_newer(merger, batch, stored, known) ~ ' then ' ~ new ~ ' else ' ~ old
        ~ ' end'
    ) }}
{% endmacro %}


{% macro _merger_merge(merger, batch, target, columns, looked_up, incremental_predicates) %}
    {#-
        Stale rows leave the batch before the merge: Delta rewrites each file that holds a matched row, even when no
        clause applies to it, and a rerun shall write nothing.

        `rand() < 1` is always true and makes the batch nondeterministic for Delta, which then evaluates it once, before
        anything else, and keeps it; otherwise it would be evaluated for finding the files and again for writing them.
    -#}
    {%- if looked_up.is_empty -%}
        {{ return('select 0 as merged_rows') }}
    {%- endif -%}
    {%- set source, stored = 'DBT_INTERNAL_SOURCE', 'DBT_INTERNAL_DEST' -%}
    {%- set deleted = source ~ '.' ~ lakehouse_patterns.quoted_name(merger.is_deleted) if merger.deletes == 'hard' -%}
    {%- set newer = ' and ' ~ lakehouse_patterns._merger_newer(merger, source, stored) if merger.sequence else '' -%}
    merge into {{ target }} as {{ stored }}
    using (
        select batch.*
        from (
            {{ lakehouse_patterns._merger_latest(
                merger, batch, looked_up.partitions, with_known=merger.sequence | length > 0
            ) }}
        ) as batch
        {%- if looked_up.may_be_stale %}
        left anti join {{ target }} as stored
            on {{ (
                lakehouse_patterns._merger_same_key(merger, 'batch', 'stored')
                + lakehouse_patterns._merger_pruned(looked_up.partitions, 'stored')
                + ['not ' ~ lakehouse_patterns._merger_newer(merger, 'batch', 'stored')]
            ) | join('\n            and ') }}
        {%- endif %}
        where rand() < 1
    ) as {{ source }}
    on {{ (
        lakehouse_patterns._merger_same_key(merger, source, stored)
        + lakehouse_patterns._merger_pruned(looked_up.partitions, stored)
        + incremental_predicates
    ) | join('\n        and ') }}
    {%- if deleted %}
    when matched and {{ deleted }}{{ newer }} then delete
    {%- endif %}
    when matched{{ newer }} then update set
        {%- for name in columns.updated %}
        {{ lakehouse_patterns.quoted_name(name) }} = {{ lakehouse_patterns._merger_updated(merger, name, source, stored) }}
        {{- ',' if not loop.last }}
        {%- endfor %}
    when not matched{{ ' and not ' ~ deleted if deleted }} then insert (
        {{ lakehouse_patterns.quoted_names(columns.inserted) | join(', ') }}
    ) values (
        {{ lakehouse_patterns.quoted_names(columns.inserted, source) | join(', ') }}
    )
{% endmacro %}
