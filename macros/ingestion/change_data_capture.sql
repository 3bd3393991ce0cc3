{#-
    Change Data Capture in SQL: typed changes from the records that `python_jobs/ingestion/change_data_capture.py`
    writes to bronze. There are two models: a view over `change_data_capture_flags`, and an incremental table (append)
    over `change_data_capture_changes`. From that table the Merger builds the current state, and `materialized='scd2'`
    the history.

    `lsn`, the change's position in PostgreSQL's log, orders the changes of a row, because a transaction holds the row's
    lock until its commit. The topic's offset does not, because a restarted connector sends its last changes again.
-#}

{% macro change_data_capture_flags(relation, columns, key) %}
    {{ return(adapter.dispatch('change_data_capture_flags', 'lakehouse_patterns')(relation, columns, key)) }}
{% endmacro %}

{% macro default__change_data_capture_flags(relation, columns, key) %}
    {%- set columns = lakehouse_patterns._cdc_columns(columns, key) -%}
    {%- set key = lakehouse_patterns.as_list(key) -%}
    {%- set sources = columns.values() | map(attribute='from') | list -%}
    {%- set key_sources = [] -%}
    {%- for name in key -%}
        {%- do key_sources.append(columns[name]['from']) -%}
    {%- endfor -%}
    {%- set row = 'struct<' ~ lakehouse_patterns._cdc_text_fields(sources) ~ '>' -%}
    {%- set envelope = 'op: string, before: ' ~ row ~ ', after: ' ~ row
        ~ ', source: struct<lsn: bigint, ts_us: bigint, ts_ms: bigint>'
        ~ ', transaction: struct<id: string, total_order: bigint>' -%}
    {%- set record_key = lakehouse_patterns._cdc_text_fields(key_sources) -%}
    {%- set row_operations = "op in ('c', 'r', 'u', 'd')" -%}
select
    record,
    ingested_at,
    {%- for name in columns %}
    {{ adapter.quote(name) }},
    {%- endfor %}
    op,
    lsn,
    transaction_id,
    transaction_order,
    changed_at,
    op = 'd' as is_deleted,
    error.class as error_class,
    error.message as error_message
from (
    select
        *,
        {#- The first reason counts. -#}
        case
            when record.payload is null then null
            when op is null
                then named_struct('class', 'MALFORMED_ENVELOPE', 'message', 'the payload is no JSON object with op')
            when op not in ('c', 'r', 'u', 'd', 't', 'm')
                then named_struct(
                    'class', 'UNKNOWN_OPERATION',
                    'message', concat('op is ''', op, '''; known are c, r, u, d, t, m')
                )
            when op = 'm' then null
            when lsn is null or changed_at is null
                then named_struct('class', 'MALFORMED_ENVELOPE', 'message', 'source.lsn or its time is missing')
            when op = 't' then null
            when op <> 'd' and not has_after
                then named_struct('class', 'MALFORMED_ENVELOPE', 'message', concat('op ', op, ' without after'))
            when unavailable <> ''
                then named_struct(
                    'class', 'UNAVAILABLE_VALUE',
                    'message', concat('PostgreSQL left out the unchanged ', unavailable, '; set REPLICA IDENTITY FULL')
                )
            when invalid <> ''
                then named_struct('class', 'INVALID_VALUE', 'message', concat('no value of the type in ', invalid))
            when {% for name in key %}{{ adapter.quote(name) }} is null{{ ' or ' if not loop.last }}{% endfor %}
                then named_struct('class', 'NULL_KEY', 'message', 'the key is missing')
        end as error
    from (
        select
            record,
            ingested_at,
            op,
            lsn,
            transaction_id,
            transaction_order,
            changed_at,
            has_after,
            concat_ws(
                ', '
                {%- for name, column in columns.items() %},
                case when op = 'u' and {{ lakehouse_patterns._cdc_is_left_out('texts.' ~ adapter.quote(name)) }}
                    then '{{ name }}' end
                {%- endfor %}
            ) as unavailable,
            concat_ws(
                ', '
                {%- for name, column in columns.items() %},
                case when {{ row_operations if name in key else "op in ('c', 'r', 'u')" }}
                    and texts.{{ adapter.quote(name) }} is not null
                    and {{ lakehouse_patterns._cdc_typed('texts.' ~ adapter.quote(name), column) }} is null
                    then '{{ name }} ({{ column.type }})' end
                {%- endfor %}
            ) as invalid,
            {%- for name, column in columns.items() %}
            {{ lakehouse_patterns._cdc_typed('texts.' ~ adapter.quote(name), column) }} as {{ adapter.quote(name) }}
            {{- ',' if not loop.last }}
            {%- endfor %}
        from (
            select
                record,
                ingested_at,
                envelope.op,
                envelope.source.lsn,
                envelope.transaction.id as transaction_id,
                envelope.transaction.total_order as transaction_order,
                timestamp_micros(
                    coalesce(envelope.source.ts_us, try_multiply(envelope.source.ts_ms, 1000L))
                ) as changed_at,
                envelope.after is not null as has_after,
                struct(
                    {%- for name, column in columns.items() %}
                    {%- set field = adapter.quote(column['from']) %}
                    case
                        when envelope.op = 'd' then
                            {%- if name in key %}
                            coalesce(envelope.before.{{ field }}, record_key.{{ field }}, record_key.payload.{{ field }})
                            {%- else %}
                            envelope.before.{{ field }}
                            {%- endif %}
                        {#- PostgreSQL sends an unchanged large value only with a full replica identity. #}
                        when {{ lakehouse_patterns._cdc_is_left_out('envelope.after.' ~ field) }}
                            then coalesce(envelope.before.{{ field }}, envelope.after.{{ field }})
                        else envelope.after.{{ field }}
                    end as {{ adapter.quote(name) }}
                    {{- ',' if not loop.last }}
                    {%- endfor %}
                ) as text_values
            from (
                select
                    record,
                    ingested_at,
                    {#- Connect's converter wraps the envelope when it also sends the schema. #}
                    case
                        when parsed.op is null and parsed.payload is not null then parsed.payload
                        else struct(parsed.op, parsed.before, parsed.after, parsed.source, parsed.transaction)
                    end as envelope,
                    from_json(record.key, 'struct<{{ record_key }}, payload: struct<{{ record_key }}>>') as record_key
                from (
                    select
                        struct(payload, key, topic, partition, offset, timestamp, headers) as record,
                        ingested_at,
                        parsed
                    from {{ relation }}
                    {#- Spark copies expressions into a pushed-down filter, and would parse a record a hundred times.
                        A lateral view stops these copies, while a filter on ingested_at still prunes. #}
                    lateral view explode(
                        array(from_json(payload, 'struct<{{ envelope }}, payload: struct<{{ envelope }}>>'))
                    ) once as parsed
                )
            )
        )
        lateral view explode(array(text_values)) once as texts
    )
)
{%- endmacro %}


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
    select *
    from {{ flagged }}
    where
        error_class is null
        and op in ('c', 'r', 'u', 'd', 't')
        and {{ batch.window }}
),

{# A restarted connector sends its last changes again: the first copy of each counts. -#}
row_changes as (
    select {{ (lakehouse_patterns.quoted_names(columns) + own) | join(', ') }}
    from (
        select
            *,
            row_number() over (
                partition by {{ key | join(', ') }}, lsn, op
                order by ingested_at, record.offset
            ) as copy_number
        from batch
        where op <> 't'
    ) as changes
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
    where copy_number = 1
)

select *
from row_changes
{%- if batch.has_truncates %}
union all
{# A truncate names no row: it deletes every key whose last change before it wasn't a deletion. -#}
select
    {%- for name, type in columns.items() %}
    {{ 'known.' ~ adapter.quote(name) if name in key_names
        else 'cast(null as ' ~ type ~ ') as ' ~ adapter.quote(name) }},
    {%- endfor %}
    {%- for name in of_truncate %}
    truncates.{{ name }},
    {%- endfor %}
    true as is_deleted,
    truncates.ingested_at
from batch as truncates
inner join (
    select {{ key | join(', ') }}, lsn, is_deleted
    from row_changes
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


{% macro _cdc_own_columns() %}
    {{ return([
        'record', 'ingested_at', 'op', 'lsn', 'transaction_id', 'transaction_order', 'changed_at', 'is_deleted',
        'error_class', 'error_message'
    ]) }}
{% endmacro %}


{% macro _cdc_row_columns(flagged, key_names) %}
    {#- The columns of the source's rows with their types; only the key while the flagged relation is absent. -#}
    {%- set columns = {} -%}
    {%- for name, type in (lakehouse_patterns.column_types(flagged) if execute else {}).items()
        if name not in lakehouse_patterns._cdc_own_columns() -%}
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


{% macro _cdc_columns(columns, key) %}
    {#- The columns with all options: a mapping from the name to {type, from, unit}. -#}
    {%- do lakehouse_patterns.require(
        columns is mapping and columns | length > 0,
        'columns must map the names of the columns to their types, got ' ~ columns
    ) -%}
    {%- set own = lakehouse_patterns._cdc_own_columns() -%}
    {%- set complete = {} -%}
    {%- for name, given in columns.items() -%}
        {%- set column = {'type': given} if given is string else given -%}
        {%- do lakehouse_patterns.require(
            column is mapping, "column '" ~ name ~ "' needs a type or a mapping {type, from, unit}, got " ~ given
        ) -%}
        {%- do lakehouse_patterns.require_known_keys("column '" ~ name ~ "'", column, ['type', 'from', 'unit']) -%}
        {%- do lakehouse_patterns.require(column.type, "column '" ~ name ~ "' has no type") -%}
        {%- do lakehouse_patterns.require(
            name not in own,
            "'" ~ name ~ "' is a column of a change itself: give it another name, and its name in the source as from"
        ) -%}
        {%- do lakehouse_patterns.require_one_of(
            "unit of column '" ~ name ~ "'", column.get('unit', 'microseconds'), ['microseconds', 'milliseconds']
        ) -%}
        {%- do complete.update({name: {
            'type': column.type | lower, 'from': column.get('from', name), 'unit': column.get('unit', 'microseconds')
        }}) -%}
    {%- endfor -%}
    {%- do lakehouse_patterns.require(lakehouse_patterns.as_list(key), 'key must name the columns of the primary key') -%}
    {%- for name in lakehouse_patterns.as_list(key) -%}
        {%- do lakehouse_patterns.require(
            name in complete, "key names '" ~ name ~ "', which is none of the columns " ~ (complete | join(', '))
        ) -%}
    {%- endfor -%}
    {{ return(complete) }}
{% endmacro %}


{% macro _cdc_text_fields(names) %}
    {#- Every value is read as text first, because from_json silently drops a number that doesn't fit its type. -#}
    {%- set fields = [] -%}
    {%- for name in names | unique -%}
        {%- do fields.append(adapter.quote(name) ~ ': string') -%}
    {%- endfor -%}
    {{ return(fields | join(', ')) }}
{% endmacro %}


{% macro _cdc_is_left_out(text) %}
    {#- Debezium's placeholder for a value that was left out: plain, in an array, or in base64. -#}
    {{ return("(contains(" ~ text ~ ", '__debezium_unavailable_value') or " ~ text
        ~ " = 'X19kZWJleml1bV91bmF2YWlsYWJsZV92YWx1ZQ==')") }}
{% endmacro %}


{% macro _cdc_typed(text, column) %}
    {#- A value of the type from Debezium's notation (time.precision.mode adaptive); NULL if the text is none. -#}
    {%- set type = column.type -%}
    {%- if type == 'string' -%}
        {{ return(text) }}
    {%- elif type == 'timestamp' -%}
        {%- set number = 'try_cast(' ~ text ~ ' as bigint)' -%}
        {%- set micros = 'try_multiply(' ~ number ~ ', 1000L)' if column.unit == 'milliseconds' else number -%}
        {{ return('coalesce(timestamp_micros(' ~ micros ~ '), try_to_timestamp(' ~ text ~ '))') }}
    {%- elif type == 'date' -%}
        {{ return(
            'coalesce(date_from_unix_date(try_cast(' ~ text ~ ' as int)), try_cast(' ~ text ~ ' as date))'
        ) }}
    {%- elif type == 'binary' -%}
        {{ return("try_to_binary(" ~ text ~ ", 'base64')") }}
    {%- elif type.startswith('array') or type.startswith('map') or type.startswith('struct') -%}
        {{ return("from_json(" ~ text ~ ", '" ~ type ~ "')") }}
    {%- elif modules.re.fullmatch('decimal\\(\\s*\\d+\\s*,\\s*\\d+\\s*\\)', type) -%}
        {#- A plain cast would round a value of a wider column of the source. -#}
        {%- set digits = modules.re.findall('\\d+', type) -%}
        {%- set exact = 'decimal(38, ' ~ (38 - (digits[0] | int) + (digits[1] | int)) ~ ')' -%}
        {{ return(
            'case when try_cast(' ~ text ~ ' as ' ~ type ~ ') = try_cast(' ~ text ~ ' as ' ~ exact
            ~ ') then try_cast(' ~ text ~ ' as ' ~ type ~ ') end'
        ) }}
    {%- else -%}
        {{ return('try_cast(' ~ text ~ ' as ' ~ type ~ ')') }}
    {%- endif -%}
{% endmacro %}
