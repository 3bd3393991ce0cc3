{#- The valid changes of a model that reads the flagged records, each once. -#}

{% macro change_data_capture_changes(flagged, key) %}
    {{ return(adapter.dispatch('change_data_capture_changes', 'lakehouse_patterns')(flagged, key)) }}
{% endmacro %}

{% macro default__change_data_capture_changes(flagged, key) %}
    {%- set key_names = lakehouse_patterns.as_list(key) -%}
    {%- do lakehouse_patterns.require(key_names, 'key must name the columns of the primary key') -%}
    {%- set key = lakehouse_patterns.quoted_names(key_names) -%}
    {%- set columns = lakehouse_patterns._cdc_row_columns(flagged, key_names) -%}
    {%- set batch = lakehouse_patterns._cdc_batch(flagged) -%}
    {%- set of_truncate = ['op', 'lsn', 'transaction_id', 'transaction_order', 'changed_at'] -%}
    {%- set own = of_truncate + ['is_deleted', 'ingested_at'] -%}
with batch as (
    {#- A restarted connector sends its last changes again: the first copy of each counts. #}
    select *
    from (
        select
            *,
            row_number() over (
                partition by {{ key | join(', ') }}, lsn, op
                order by ingested_at, record.offset
            ) as __lp_copy
        from {{ flagged }}
        where
            error_class is null
            and op in ('c', 'r', 'u', 'd', 't')
            and {{ batch.window }}
    ) as copies
    where __lp_copy = 1
),

changes as (
    select {{ (lakehouse_patterns.quoted_names(columns) + own) | join(', ') }}
    from batch
    where op <> 't'
    {%- if batch.has_truncates %}
    union all
    {# A truncate names no row: it deletes every key whose last change before it wasn't a deletion. If several
       truncates have no change of the key between them, the first one deletes it. -#}
    select {{ (lakehouse_patterns.quoted_names(columns) + own) | join(', ') }}
    from (
        select
            {%- for name, type in columns.items() %}
            {{ lakehouse_patterns.quoted_name(name, 'known') if name in key_names
                else 'cast(null as ' ~ type ~ ') as ' ~ lakehouse_patterns.quoted_name(name) }},
            {%- endfor %}
            {%- for name in of_truncate %}
            truncates.{{ name }},
            {%- endfor %}
            true as is_deleted,
            truncates.ingested_at,
            row_number() over (
                partition by {% for name in key %}known.{{ name }}, {% endfor %}max(known.lsn)
                order by truncates.lsn
            ) as __lp_truncate
        from batch as truncates
        inner join (
            select {{ key | join(', ') }}, lsn, is_deleted
            from batch
            where op <> 't'
            {%- if lakehouse_patterns.is_incremental() %}
            union all
            select {{ key | join(', ') }}, lsn, is_deleted
            from {{ this }}
            {%- endif %}
        ) as known
            on truncates.lsn > known.lsn
        where truncates.op = 't'
        group by
            {%- for name in key %}
            known.{{ name }},
            {%- endfor %}
            {%- for name in of_truncate %}
            truncates.{{ name }},
            {%- endfor %}
            truncates.ingested_at
        having not max_by(known.is_deleted, known.lsn)
    ) as deletions
    where __lp_truncate = 1
    {%- endif %}
)

select {{ (lakehouse_patterns.quoted_names(columns) + own) | join(', ') }}
from changes
{%- if batch.first_lsn is not none %}
left anti join (
    select {{ key | join(', ') }}, lsn, op
    from {{ this }}
    where lsn >= {{ batch.first_lsn }}
) as held
    on changes.lsn = held.lsn
    and changes.op = held.op
    {%- for name in key %}
    and changes.{{ name }} = held.{{ name }}
    {%- endfor %}
{%- endif %}
{%- endmacro %}

{% macro _cdc_batch(flagged) %}
    {#-
        The window of this run, whether it holds truncates, and `first_lsn`, from which on the model may already hold
        changes. The end of the window is fixed here, because the statement depends on whether the window has truncates,
        and a truncate could arrive in between. This query doesn't check the records for errors: the check takes most of
        the time, and the statement does it anyway.
    -#}
    {%- set window = lakehouse_patterns.incremental_window('ingested_at') -%}
    {%- if not execute or not lakehouse_patterns.is_incremental() -%}
        {{ return({'window': window, 'first_lsn': none, 'has_truncates': true}) }}
    {%- endif -%}
    {%- set row = run_query(
        "select unix_micros(max(ingested_at)) as last_ingested_at, min(lsn) as first_lsn, "
        ~ "coalesce(bool_or(op = 't'), false) as has_truncates from " ~ flagged
        ~ " where " ~ window
    ).rows[0] -%}
    {%- if row['last_ingested_at'] is none -%}
        {{ return({'window': 'false', 'first_lsn': none, 'has_truncates': false}) }}
    {%- endif -%}
    {{ return({
        'window': window ~ ' and ingested_at <= timestamp_micros(' ~ row['last_ingested_at'] ~ ')',
        'first_lsn': row['first_lsn'],
        'has_truncates': row['has_truncates']
    }) }}
{% endmacro %}

{% macro _cdc_row_columns(flagged, key_names) %}
    {#- The columns of the source's rows with their types; only the key while the flagged relation is absent. -#}
    {%- set columns = {} -%}
    {%- for name, type in (lakehouse_patterns.column_types(flagged) if execute else {}).items()
        if name | lower not in lakehouse_patterns._cdc_own_columns() -%}
        {%- do columns.update({name: type}) -%}
    {%- endfor -%}
    {%- for name in key_names -%}
        {%- do lakehouse_patterns.require(
            not columns or name in columns,
            "key names '" ~ name ~ "', which is none of the columns " ~ (columns | join(', '))
        ) -%}
        {%- do columns.setdefault(name, 'string') -%}
    {%- endfor -%}
    {{ return(columns) }}
{% endmacro %}
