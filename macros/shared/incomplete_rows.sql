{#-
    Rows without a part of their key can't be told apart, and rows without a part of their sequence can't be ordered. Merger and SCD Type 2
    refuse or quarantine them by the same rules, which their options give. NaN and infinity would be the
    newest value for ever, so a row with one of them is incomplete, too.

    {relation: the model's table, types: {column: data type}, partitions, key, nullable_key, sequence: lists of columns,
    is_deleted: column or none, on_null_key: fail or quarantine}
-#}

{% macro required_columns(rules) %}
    {{ return(rules.key | reject('in', rules.nullable_key) | list + rules.sequence) }}
{% endmacro %}


{% macro is_incomplete(rules, alias) %}
    {%- set conditions = [] -%}
    {%- for name in lakehouse_patterns.required_columns(rules) -%}
        {%- do conditions.append(lakehouse_patterns._is_missing(rules, name, alias)) -%}
    {%- endfor -%}
    {{ return('(' ~ (conditions or ['false']) | join(' or ') ~ ')') }}
{% endmacro %}


{% macro _is_missing(rules, name, alias) %}
    {%- set quoted = lakehouse_patterns.quoted_name(name, alias) -%}
    {%- if name in rules.sequence and rules.types[name] in ['float', 'double'] -%}
        {{ return('not ' ~ lakehouse_patterns._is_finite_sql(quoted)) }}
    {%- endif -%}
    {{ return(quoted ~ ' is null') }}
{% endmacro %}


{% macro _what_is_missing(rules) %}
    {%- for name in rules.sequence if rules.types[name] in ['float', 'double'] -%}
        {{ return('NULL or NaN') }}
    {%- endfor -%}
    {{ return('NULL') }}
{% endmacro %}


{% macro null_columns(rules, alias) %}
    {%- set names = [] -%}
    {%- for name in lakehouse_patterns.required_columns(rules) -%}
        {%- do names.append(
            'case when ' ~ lakehouse_patterns._is_missing(rules, name, alias) ~ ' then '
            ~ lakehouse_patterns.text_literal(name) ~ ' end'
        ) -%}
    {%- endfor -%}
    {{ return("concat_ws(', ', " ~ (names | join(', ')) ~ ")") }}
{% endmacro %}


{% macro refuse_incomplete(rules, alias, what) %}
    {%- set advice = {
        'fail': 'correct the source, or quarantine such ' ~ what ~ 's with on_null_key: quarantine',
        'quarantine': 'it came while others were being quarantined, run the model again'
    } -%}
    raise_error(concat(
        {{ lakehouse_patterns.text_literal(
            'lakehouse_patterns: the batch of ' ~ rules.relation ~ ' has a ' ~ what ~ ' with '
            ~ lakehouse_patterns._what_is_missing(rules) ~ ' in '
        ) }},
        {{ lakehouse_patterns.null_columns(rules, alias) }},
        {{ lakehouse_patterns.text_literal('; ' ~ advice[rules.on_null_key]) }}
    ))
{%- endmacro %}


{% macro rows_as_stored(rules, batch) %}
    {#- A NULL flag means "not deleted". -#}
    (
        select
            {%- for name, type in rules.types.items() %}
            {%- set quoted = lakehouse_patterns.quoted_name(name) %}
            {% if name == rules.is_deleted -%}
                coalesce({{ quoted }}, false) as {{ quoted }}
            {%- else -%}
                {{ lakehouse_patterns._as_stored(name, type, rules.partitions) }}
            {%- endif %}
            {{- ',' if not loop.last }}
            {%- endfor %}
        from {{ batch }}
    )
{%- endmacro %}


{% macro row_payload(rules, alias) %}
    {{ return(lakehouse_patterns.json_text(
        'struct(' ~ (lakehouse_patterns.quoted_names(rules.types, alias) | join(', ')) ~ ')'
    )) }}
{% endmacro %}


{% macro quarantine_table(rules) %}
    {{ return(lakehouse_patterns.relation_beside(rules.relation, '__quarantine')) }}
{% endmacro %}


{% macro without_quarantined(rules, alias) %}
    {%- if rules.on_null_key == 'quarantine' %}
left anti join {{ lakehouse_patterns.quarantine_table(rules) }} as quarantine
    on quarantine.record_hash = case
        when {{ lakehouse_patterns.is_incomplete(rules, alias) }}
            then sha2({{ lakehouse_patterns.row_payload(rules, alias) }}, 256)
    end
    {%- endif %}
{%- endmacro %}


{% macro quarantine_incomplete(rules, batch) %}
    {#-
        Writes incomplete rows to the quarantine table, once for any number of reruns, before the target is written. The merge
        then leaves out the rows that are in quarantine, not all incomplete ones: a row that comes in between stops
        the run instead of getting lost.
    -#}
    {%- if rules.on_null_key == 'quarantine' -%}
        {%- set table = lakehouse_patterns.quarantine_table(rules) -%}
        {%- call statement('create_quarantine') -%}
            create table if not exists {{ table }} (
                record_hash string comment 'sha2-256 of payload: a record is kept once',
                payload string comment 'the row of the batch as JSON',
                error_class string comment 'NULL_KEY',
                error_message string comment 'the columns that are NULL',
                copies bigint comment 'how often the batch held the row when it came first',
                quarantined_at timestamp comment 'start of the dbt run'
            )
            using delta
            {%- if config.get('location_root') %}
            location {{ lakehouse_patterns.text_literal(config.get('location_root') ~ '/' ~ table.identifier) }}
            {%- endif %}
        {%- endcall -%}
        {%- call statement('quarantine') -%}
            merge into {{ table }} as quarantine
            using (
                select
                    sha2(payload, 256) as record_hash,
                    payload,
                    'NULL_KEY' as error_class,
                    error_message,
                    count(*) as copies,
                    {{ lakehouse_patterns.timestamp_literal(run_started_at) }} as quarantined_at
                from (
                    select
                        {{ lakehouse_patterns.row_payload(rules, 'batch') }} as payload,
                        concat(
                            {{ lakehouse_patterns.text_literal(lakehouse_patterns._what_is_missing(rules) ~ ' in ') }},
                            {{ lakehouse_patterns.null_columns(rules, 'batch') }}
                        ) as error_message
                    from {{ lakehouse_patterns.rows_as_stored(rules, batch) }} as batch
                    where {{ lakehouse_patterns.is_incomplete(rules, 'batch') }}
                )
                group by payload, error_message
            ) as incomplete
            on quarantine.record_hash = incomplete.record_hash
            when not matched then insert *
        {%- endcall -%}
    {%- endif -%}
{% endmacro %}
